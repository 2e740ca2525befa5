"""The offloading core: layout of slabs, copies, clipping and AdamW. Streaming and sharding use it."""
