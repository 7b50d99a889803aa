"""An image-classification trainer for one GPU or many, on Hugging Face Accelerate.

Reading order: main.py (the command), loop.py (the training loop), hooks/ (one file each), config.py (every knob), data/sampler.py
(which rank sees which sample), state.py (how a run is built), runtime.py (how processes agree and end).
"""
