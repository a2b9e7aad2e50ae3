"""What is private in other libraries, and yet used."""
