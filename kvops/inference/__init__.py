"""The inference side: host memory over the pool, request traces and their replay."""
