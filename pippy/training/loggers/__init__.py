"""Objects that write the numbers of a training to files: CSV, TensorBoard, Weights & Biases, or one of the script's own."""
