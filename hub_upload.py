"""Publish a draft: `python hub_upload.py DRAFT --repo-id ORG/NAME` stages its repository, checks it and uploads it.

The same as `dflash-hf upload`, from a clone; `dflash_hf/publishing/` does the work.
"""

import sys

from dflash_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["upload", *sys.argv[1:]]))
