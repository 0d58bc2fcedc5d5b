"""Measures a real model on real chats: Slotwise beside its peers, and what its features gain."""
