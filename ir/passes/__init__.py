"""What is added to a Pipe: its loss and its backward; and the rules that every Pipe keeps."""
