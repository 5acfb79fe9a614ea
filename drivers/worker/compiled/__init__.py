"""Stages whose forward and backward run as flat graphs: F, and B or its halves I and W."""
