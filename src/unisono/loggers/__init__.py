"""Where people look at figures: TensorBoard, CSV, MLflow, Weights & Biases.

logger.py is the protocol, by_name.py the loggers that are known by name.
It may import `plan` and what lies below it.
"""
