"""Policy versions as bytes: names and frames, codecs, manifests, chains, storage, transfer."""
