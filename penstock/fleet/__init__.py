"""Workers as processes: starting, watching, restarting and stopping them."""
