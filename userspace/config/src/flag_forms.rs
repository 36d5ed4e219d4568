//! Maps and lists as one text, for variables, in the form of the kubelet's flags with the same names.

use numaward_engine::policy::go_bool;
use serde_json::{Map, Value, json};

/// The form of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `name=value,name=value`, or with another separator between the two.
    Pairs(char),
    /// `Name=true,Name=false`.
    Gates,
    /// `node:kind=amount,kind=amount;node:kind=amount`.
    ReservedMemory,
}

/// Returns the form of a top-level key, if it has one.
pub(super) fn form(path: &[impl AsRef<str>]) -> Option<Form> {
    let [key] = path else { return None };
    match key.as_ref() {
        "kubeReserved" | "systemReserved" | "cpuManagerPolicyOptions" | "topologyManagerPolicyOptions" => {
            Some(Form::Pairs('='))
        }
        "evictionHard" => Some(Form::Pairs('<')),
        "featureGates" => Some(Form::Gates),
        "reservedMemory" => Some(Form::ReservedMemory),
        _ => None,
    }
}

impl Form {
    /// Parses a text.
    pub(super) fn parse(self, text: &str) -> Result<Value, String> {
        match self {
            Self::Pairs(sign) => Ok(pairs(text, sign)?.collect()),
            Self::Gates => {
                let gate = |(name, value): (String, &str)| {
                    let problem = || format!("{name}: {value:?} is neither true nor false");
                    Ok((name.clone(), go_bool(value).ok_or_else(problem)?.into()))
                };
                Ok(Value::Object(pairs(text, '=')?.map(gate).collect::<Result<_, String>>()?))
            }
            // Like an absent key.
            Self::ReservedMemory if text.is_empty() => Ok(Value::Null),
            Self::ReservedMemory => text.split(';').map(reserved).collect(),
        }
    }
}

/// Parses names and values. Empty parts between commas are ignored.
fn pairs(text: &str, sign: char) -> Result<impl Iterator<Item = (String, &str)>, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair
            .split_once(sign)
            .ok_or_else(|| format!("{pair:?} has no {sign:?}: expected name{sign}value,name{sign}value"))?;
        Ok((name.trim().to_owned(), value.trim()))
    });
    Ok(pairs.collect::<Result<Vec<_>, String>>()?.into_iter())
}

/// Parses the reservation of one node.
fn reserved(text: &str) -> Result<Value, String> {
    let form =
        || format!("{text:?} is not a node with its reservation, such as 0:memory=1Gi,hugepages-2Mi=100Mi");
    let (node, amounts) = text.split_once(':').ok_or_else(form)?;
    let node: u32 =
        node.trim().parse().map_err(|_| format!("{}: {node:?} is not the id of a node", form()))?;
    let amount = |part: &str| {
        let (kind, amount) =
            part.split_once('=').ok_or_else(|| format!("{}: {part:?} has no '='", form()))?;
        Ok((kind.trim().to_owned(), amount.trim().into()))
    };
    let limits: Map<String, Value> = amounts.split(',').map(amount).collect::<Result<_, String>>()?;
    Ok(json!({ "numaNode": node, "limits": limits }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_texts_like_kubelet_flags() {
        let read = |key: &str, text: &str| form(&[key]).unwrap().parse(text);
        for (key, text, value) in [
            ("kubeReserved", "cpu=500m,memory=1Gi", json!({"cpu": "500m", "memory": "1Gi"})),
            ("systemReserved", " cpu = 1 ,,", json!({"cpu": "1"})),
            ("systemReserved", "", json!({})),
            ("cpuManagerPolicyOptions", "a=true,b=x=y", json!({"a": "true", "b": "x=y"})),
            (
                "evictionHard",
                "memory.available<100Mi,nodefs.available<10%",
                json!({
                    "memory.available": "100Mi", "nodefs.available": "10%"
                }),
            ),
            ("featureGates", "A=true,B=F", json!({"A": true, "B": false})),
            (
                "reservedMemory",
                "0:memory=1Gi,hugepages-2Mi=100Mi;1:memory=1Gi",
                json!([
                    {"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "100Mi"}},
                    {"numaNode": 1, "limits": {"memory": "1Gi"}}
                ]),
            ),
            ("reservedMemory", "", Value::Null),
        ] {
            assert_eq!(read(key, text), Ok(value), "{key} {text}");
        }
        for (key, text, problem) in [
            ("kubeReserved", "cpu=1,memory", "\"memory\" has no '=': expected name=value,name=value"),
            ("evictionHard", "memory.available=1Gi", "has no '<': expected name<value,name<value"),
            ("featureGates", "A=on", "A: \"on\" is neither true nor false"),
            ("reservedMemory", "memory=1Gi", "\"memory=1Gi\" is not a node with its reservation"),
            ("reservedMemory", "x:memory=1Gi", "\"x\" is not the id of a node"),
            ("reservedMemory", "0:memory=1Gi;", "\"\" is not a node"),
            ("reservedMemory", "0:memory", "\"memory\" has no '='"),
        ] {
            let found = read(key, text).unwrap_err();
            assert!(found.contains(problem), "{key} {text}: {found}");
        }
        assert_eq!((form(&["log", "level"]), form(&["listen"])), (None, None));
    }
}
