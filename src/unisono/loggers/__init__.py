"""Where people look at figures: TensorBoard, CSV, MLflow, Weights & Biases."""
