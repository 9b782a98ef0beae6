//! The cost of JSON schemas that clients send. Alternatives that must hold together multiply, and a
//! grammar is compiled from all of their combinations.

use std::collections::HashMap;

use serde_json::Value;

/// The largest number that a schema may set for the items of an array.
const MAX_ITEMS: u64 = 10_000;
/// The most combinations of alternatives (`anyOf`, `oneOf`) that must hold at the same time (`allOf`,
/// references and neighbours).
const MAX_COMBINATIONS: u64 = 1_000;

/// Checks that a grammar can be compiled from a schema in a bounded time.
///
/// # Errors
/// What is too costly, and what is allowed.
pub(crate) fn check(schema: &Value) -> Result<(), String> {
    let mut counter = Counter { root: schema, known: HashMap::new() };
    match counter.combinations(schema)? {
        found if found > MAX_COMBINATIONS => Err(format!(
            "the schema has {found} combinations of alternatives; allowed are {MAX_COMBINATIONS}"
        )),
        _ => Ok(()),
    }
}

struct Counter<'a> {
    root: &'a Value,
    /// The combinations of each schema that was counted, by its address; 1 while it is counted, so
    /// that a recursive one counts once.
    known: HashMap<*const Value, u64>,
}

impl<'a> Counter<'a> {
    fn combinations(&mut self, schema: &'a Value) -> Result<u64, String> {
        let Value::Object(members) = schema else { return Ok(1) };
        let address: *const Value = schema;
        if let Some(known) = self.known.get(&address) {
            return Ok(*known);
        }
        self.known.insert(address, 1);
        // What holds together multiplies; of members that are written one after the other, the
        // largest counts.
        let mut product: u64 = 1;
        let mut largest: u64 = 1;
        for (name, value) in members {
            match (name.as_str(), value) {
                (
                    "minItems" | "maxItems" | "minContains" | "maxContains",
                    Value::Number(number),
                ) if number.as_f64().is_some_and(|number| number > MAX_ITEMS as f64) => {
                    return Err(format!(
                        "{name} {number} is not allowed: it must be at most {MAX_ITEMS}"
                    ));
                }
                ("anyOf" | "oneOf", Value::Array(list)) => {
                    let mut sum: u64 = 0;
                    for one in list {
                        sum = sum.saturating_add(self.combinations(one)?);
                    }
                    product = product.saturating_mul(sum.max(1));
                }
                ("allOf", Value::Array(list)) => {
                    for one in list {
                        product = product.saturating_mul(self.combinations(one)?);
                    }
                }
                ("$ref", Value::String(reference)) => {
                    if let Some(target) = target(self.root, reference) {
                        product = product.saturating_mul(self.combinations(target)?);
                    }
                }
                ("properties" | "patternProperties", Value::Object(inner)) => {
                    for one in inner.values() {
                        largest = largest.max(self.combinations(one)?);
                    }
                }
                ("prefixItems" | "items", Value::Array(list)) => {
                    for one in list {
                        largest = largest.max(self.combinations(one)?);
                    }
                }
                (
                    "items"
                    | "additionalProperties"
                    | "additionalItems"
                    | "contains"
                    | "not"
                    | "if"
                    | "then"
                    | "else",
                    Value::Object(_),
                ) => largest = largest.max(self.combinations(value)?),
                _ => {}
            }
        }
        let found = product.saturating_mul(largest);
        self.known.insert(address, found);
        Ok(found)
    }
}

/// Returns what a reference within a schema means.
fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(reference.strip_prefix('#')?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn usual_schemas_are_cheap() {
        let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
            "value": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 10}}}}});
        assert_eq!(check(&tree), Ok(()));
        assert_eq!(check(&json!(true)), Ok(()));
    }

    #[test]
    fn products_of_alternatives_are_refused() {
        let one = |n: i32| json!({"anyOf": [{"type": "string"}, {"minimum": n}]});
        let all: Vec<Value> = (0..30).map(one).collect();
        let error = check(&json!({"allOf": all})).unwrap_err();
        assert!(error.contains("1073741824 combinations"), "{error}");
        // Alternatives beside each other add up.
        let all: Vec<Value> = (0..30).map(one).collect();
        assert_eq!(check(&json!({"anyOf": all})), Ok(()));
        assert!(check(&json!({"minItems": 1e9})).unwrap_err().contains("minItems"));
    }
}
