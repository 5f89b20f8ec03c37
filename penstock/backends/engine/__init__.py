"""How does a gateway talk to Penstock's own engine? Frames over one socket per worker."""
