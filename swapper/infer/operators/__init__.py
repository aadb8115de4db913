"""Operators that read less than a whole weight: rows of embeddings, experts of mixtures, parts of matrices."""
