"""The float32 masters: who may read them when, the words they round to, files of them."""
