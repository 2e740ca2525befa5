"""Each file of this folder is one method, unless its name begins with an underscore."""
