"""Training a draft: data, masks, loss, trainer."""
