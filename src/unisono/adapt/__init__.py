"""What is seen of training from inside, and what follows from it."""
