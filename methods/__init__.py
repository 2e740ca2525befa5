"""One file is one method; a leading underscore is not a method."""
