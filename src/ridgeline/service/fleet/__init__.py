"""A router in front of several servers, and the fleet of servers that it starts and scales."""
