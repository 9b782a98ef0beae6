"""A handler behind an envelope: it answers with what it is given."""


class Items:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [item["data"] if isinstance(item, dict) else item.decode() if isinstance(item, bytes) else item for item in data]
