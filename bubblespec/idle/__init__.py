"""Uses of idle time, and who gets it: drafting coming samples ahead is the first of them.

May import: speculate, data, engine, ranks and what lies below.
"""
