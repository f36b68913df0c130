"""The pages of `posttrain ui`, in Gradio: thin, since posttrain.ui has what they show. Imports no torch."""
