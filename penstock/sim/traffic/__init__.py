"""What do simulated clients send, and when?"""
