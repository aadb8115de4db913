"""Models that torch's fully_shard has sharded: each rank pages its own shards."""
