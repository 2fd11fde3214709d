"""How the torch engine decodes: rows of a batch, their cache, and what is drawn for them."""
