"""What happens to a request between its arrival and its settlement?"""
