"""The module around a model, with the arguments and names of torch's class."""
