"""What is one accepted request, what is held for it, and where do plug-ins hook into its life?"""
