"""How does a request come in from a socket, and how does a response leave?"""
