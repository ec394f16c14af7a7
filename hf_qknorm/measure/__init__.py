"""What is measured of a model: logits, bounds, predictions and the weights of heads; the text for it, and plots."""
