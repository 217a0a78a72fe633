//! The envelope of every response: an object with `schema_version`. A list is an array under its own key of that object.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{Error, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

use crate::{App, ClientStatus, Fact, Flow, LinkStatus, MovedFlow, Note, Peer, ProgramRule, SCHEMA_VERSION, TradeoffPoint};

/// A response: `schema_version`, then the fields of `T`, which serializes as a JSON object. Deserialization fails if the version is higher
/// than [`SCHEMA_VERSION`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Versioned<T> {
    schema_version: Version,
    /// Content of the response.
    #[serde(flatten)]
    pub content: T,
}

impl<T> Versioned<T> {
    /// Wraps `content` with [`SCHEMA_VERSION`].
    pub fn of(content: T) -> Self {
        Self { schema_version: Version, content }
    }
}

/// A schema version. Serializes as [`SCHEMA_VERSION`]; a lower version is also accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version;

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(SCHEMA_VERSION)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            version if version > SCHEMA_VERSION => Err(D::Error::custom(format!(
                "schema_version is {version}, but this program supports {SCHEMA_VERSION} at most; use a newer braid"
            ))),
            _ => Ok(Self),
        }
    }
}

/// The schema of `T` with one more property. It keeps the name of `T`, because the type of a response is not nested in other types.
impl<T: JsonSchema> JsonSchema for Versioned<T> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn schema_id() -> Cow<'static, str> {
        format!("{}::Versioned<{}>", module_path!(), T::schema_id()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = T::json_schema(generator);
        let object = schema.ensure_object();
        let version = json!({"description": "Version of this schema.", "type": "integer", "const": SCHEMA_VERSION});
        if let Some(properties) = object.entry("properties").or_insert_with(|| json!({})).as_object_mut() {
            properties.insert("schema_version".to_owned(), version);
        }
        if let Some(required) = object.entry("required").or_insert_with(|| json!([])).as_array_mut() {
            required.insert(0, "schema_version".into());
        }
        schema
    }
}

/// An element of a list response.
pub trait Listed {
    /// JSON key of the array.
    const NAME: &'static str;
}

impl Listed for App {
    const NAME: &'static str = "apps";
}

impl Listed for ClientStatus {
    const NAME: &'static str = "clients";
}

impl Listed for Fact {
    const NAME: &'static str = "facts";
}

impl Listed for MovedFlow {
    const NAME: &'static str = "rewrites";
}

impl Listed for ProgramRule {
    const NAME: &'static str = "rules";
}

impl Listed for Flow {
    const NAME: &'static str = "flows";
}

impl Listed for LinkStatus {
    const NAME: &'static str = "links";
}

impl Listed for Note {
    const NAME: &'static str = "notes";
}

impl Listed for Peer {
    const NAME: &'static str = "peers";
}

impl Listed for TradeoffPoint {
    const NAME: &'static str = "points";
}

/// A list of `T` as an object: `{"links": [...]}`. `C` is any type that serializes as an array of `T`.
#[derive(Debug, Clone, PartialEq)]
pub struct List<T, C = Vec<T>> {
    /// Elements of the list.
    pub items: C,
    kind: PhantomData<T>,
}

impl<T, C> List<T, C> {
    /// A list of these elements.
    pub fn of(items: C) -> Self {
        Self { items, kind: PhantomData }
    }
}

impl<T: Listed, C: Serialize> Serialize for List<T, C> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(T::NAME, &self.items)?;
        map.end()
    }
}

impl<'de, T: Listed, C: Deserialize<'de>> Deserialize<'de> for List<T, C> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T, C>(PhantomData<(T, C)>);

impl<'de, T: Listed, C: Deserialize<'de>> Visitor<'de> for ListVisitor<T, C> {
    type Value = List<T, C>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object with the key {:?}", T::NAME)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut items = None;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key == T::NAME {
                items = Some(map.next_value()?);
            } else {
                map.next_value::<serde::de::IgnoredAny>()?;
            }
        }
        items.map(List::of).ok_or_else(|| M::Error::missing_field(T::NAME))
    }
}

impl<T: Listed + JsonSchema, C> JsonSchema for List<T, C> {
    fn schema_name() -> Cow<'static, str> {
        format!("{}List", T::schema_name()).into()
    }

    fn schema_id() -> Cow<'static, str> {
        format!("{}::List<{}>", module_path!(), T::schema_id()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let items = generator.subschema_for::<T>();
        schemars::json_schema!({
            "type": "object",
            "properties": {T::NAME: {"type": "array", "items": items}},
            "required": [T::NAME],
        })
    }
}
