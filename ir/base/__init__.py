"""What all of the compiler uses: errors, values with tensors inside, names, lines of the user's source, marks."""
