"""What is measured of a model: logits, bounds, predictions and the weights of heads; and the text for it."""
