"""How does a worker's output become the client's response?"""
