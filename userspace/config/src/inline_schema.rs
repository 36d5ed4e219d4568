//! The JSON schemas of values with a form of their own.

/// What a value with a form of its own may be; written where it is used.
macro_rules! inline_schema {
    ($type:ident, $schema:tt) => {
        impl schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($schema)
            }
        }
    };
}
pub(super) use inline_schema;
