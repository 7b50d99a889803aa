"""Models by name (build.py), the tutorials' ConvNet, and BatchNorm over all processes on any device."""
