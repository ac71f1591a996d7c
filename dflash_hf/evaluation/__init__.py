"""What drafts are judged by: generating, explaining, measuring. Every command-line module here is light to import."""
