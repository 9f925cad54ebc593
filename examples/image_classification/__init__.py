"""Image classification over HTTP: a ResNet in plain PyTorch, and the app around it."""
