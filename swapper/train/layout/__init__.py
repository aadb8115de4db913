"""What a model and its optimizer consist of, which tensors are placed where, and what sections are filled with."""
