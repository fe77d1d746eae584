"""A sweep over every model of torchvision, timm and Transformers: does bayesify hold on each? `python -m tests.zoo`."""
