"""Publishing a draft: stage a Hub repository, check it as a stranger would, upload it in one commit."""
