"""The training methods: each file of this folder is one method, unless the file's name begins with an underscore."""
