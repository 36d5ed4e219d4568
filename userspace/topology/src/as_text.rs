//! Serde support for types that are serialized as text.

#[doc(hidden)]
pub use serde;

/// Implements serde's `Serialize` by `Display` and `Deserialize` by `FromStr`.
///
/// Type parameters come first, in brackets: `serde_as_text!([T: Id] IdSet<T>)`.
#[macro_export]
macro_rules! serde_as_text {
    ([$($parameters:tt)*] $type:ty) => {
        impl<$($parameters)*> $crate::as_text::serde::Serialize for $type {
            fn serialize<S: $crate::as_text::serde::Serializer>(
                &self,
                serializer: S,
            ) -> ::std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de, $($parameters)*> $crate::as_text::serde::Deserialize<'de> for $type {
            fn deserialize<D: $crate::as_text::serde::Deserializer<'de>>(
                deserializer: D,
            ) -> ::std::result::Result<Self, D::Error> {
                type Text<'de> = ::std::borrow::Cow<'de, str>;
                let text = <Text<'de> as $crate::as_text::serde::Deserialize>::deserialize(deserializer)?;
                text.parse().map_err($crate::as_text::serde::de::Error::custom)
            }
        }
    };
    ($type:ty) => {
        $crate::serde_as_text!([] $type);
    };
}
