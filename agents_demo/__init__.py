"""Small agents that show what a shared prefix cache saves. Each is a program: python -m agents_demo.react_openai."""
