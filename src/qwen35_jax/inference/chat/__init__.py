"""Chats: what goes into the template, what an answer says, and the turns of a conversation."""
