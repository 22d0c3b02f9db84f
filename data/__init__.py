"""Small inputs that ship with the project, and what makes and grades them: the micro-world."""
