"""Who is calling, and for which tenant?"""
