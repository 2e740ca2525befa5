"""The core of offloading: layout of tensors in slabs, copies between host and device, gradient clipping, and AdamW. The
packages streaming and sharding use it.
"""
