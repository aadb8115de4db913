"""What examples, tools and the demo share: a model, a corpus, and measurements of drives, limits and memory."""
