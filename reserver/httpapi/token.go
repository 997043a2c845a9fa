package httpapi

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/keys"
)

// A reservation's token is a JSON Web Token (RFC 7519, signed with EdDSA as in RFC 8037) that the checkout can verify without
// asking: by whom, for what sale, until when. It proves that the units were granted, not that they are held still.

// tokenIssuer is the token's iss; its aud is the UID of the sale.
const tokenIssuer = "flashsale"

type tokenClaims struct {
	Issuer    string    `json:"iss"`
	Audience  uuid.UUID `json:"aud"`
	ID        uuid.UUID `json:"jti"` // the reservation's
	Subject   string    `json:"sub"` // the buyer
	SKU       string    `json:"sku"`
	Quantity  int       `json:"quantity"`
	IssuedAt  int64     `json:"iat"`
	ExpiresAt int64     `json:"exp"` // in whole seconds, not after the hold's end
}

// sign makes the token of a live hold.
func sign(key *keys.Key, sale uuid.UUID, sku string, r *inventory.Reservation) string {
	claims, err := json.Marshal(tokenClaims{Issuer: tokenIssuer, Audience: sale, ID: r.ID, Subject: r.Buyer, SKU: sku, Quantity: r.Quantity,
		IssuedAt: r.GrantedAt.Unix(), ExpiresAt: r.ExpiresAt.Unix()})
	if err != nil {
		panic(fmt.Sprintf("encoding a token: %v", err)) // of plain values
	}
	// The library for tokens would make the header, which is the same each time, by a map and a JSON encoder.
	encode := base64.RawURLEncoding.AppendEncode
	token := encode(nil, fmt.Appendf(nil, `{"alg":"EdDSA","typ":"JWT","kid":"%s"}`, key.ID))
	token = encode(append(token, '.'), claims)
	return string(encode(append(token, '.'), ed25519.Sign(key.Private, token[:len(token):len(token)])))
}

// jwks answers GET /.well-known/jwks.json with the keys that tokens are signed with.
func (s *Server) jwks(w http.ResponseWriter, _ *http.Request) string {
	w.Header().Set("Content-Type", "application/jwk-set+json")
	w.Header().Set("Cache-Control", fmt.Sprintf("max-age=%d", int(time.Hour.Seconds()))) // the next keys are among them long before they are used
	_, _ = w.Write(s.identity.Keys.Ring().JWKS())                                        // the client may be gone; nothing is lost by that
	return "keys"
}
