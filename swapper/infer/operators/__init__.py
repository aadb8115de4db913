"""Defines operators that read less than a whole weight: rows of embeddings, single experts, parts of matrices."""
