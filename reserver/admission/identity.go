package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/time/rate"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/reserver/keys"
)

const (
	maxHops      = 32      // of X-Forwarded-For that are looked at
	maxToken     = 8 << 10 // bytes
	cachedTokens = 1 << 16
	cachedFor    = time.Minute // how long a token is believed whose key may have been withdrawn
	jwksEvery    = 15 * time.Minute
	fileEvery    = 10 * time.Second
)

// ErrCredential means that the request carries a credential that proves nothing.
var ErrCredential = errors.New("the credential is not accepted")

// Caller is who makes a request: a buyer, the checkout, or nobody known.
type Caller struct {
	Buyer    string // "" for none
	Checkout bool
	Address  netip.Addr // of the client, as far as the proxies between can be believed
	// Ambient says that a header of the gateway named the buyer: a browser sends what that header is made from by itself, also
	// when another site makes it.
	Ambient bool
}

// Identity says how callers prove who they are.
type Identity struct {
	// Header names the buyer; it is believed, like X-Forwarded-For, from addresses in Proxies only.
	Header  string
	Proxies []netip.Prefix
	// Token verifies buyers' tokens; nil when they have none.
	Token *Token
	// Keys know the checkout.
	Keys *keys.File
}

// Identify tells who makes the request. A credential that is not what it should be is ErrCredential; none is no error.
func (id *Identity) Identify(r *http.Request) (Caller, error) {
	c := Caller{}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return c, fmt.Errorf("%w: the peer's address is %q", ErrCredential, r.RemoteAddr)
	}
	c.Address = peer.Addr().Unmap().WithZone("")
	trusted := id.trusts(c.Address)
	if trusted {
		c.Address = id.client(c.Address, r.Header["X-Forwarded-For"])
	}
	switch bearer, sent, err := bearerOf(r); {
	case err != nil:
		return c, err
	case sent && keys.IsCheckoutToken(bearer):
		if c.Checkout = id.Keys.Ring().Checkout(bearer); !c.Checkout {
			return c, ErrCredential
		}
		return c, nil
	case sent && id.Token != nil:
		c.Buyer, err = id.Token.Buyer(bearer)
		return c, err
	}
	if !trusted {
		return c, nil // what it says of itself proves nothing
	}
	switch names := r.Header[id.Header]; {
	case len(names) > 1, len(names) == 1 && !ValidID(names[0]):
		return c, ErrCredential
	case len(names) == 1:
		c.Buyer, c.Ambient = names[0], true
	}
	return c, nil
}

func bearerOf(r *http.Request) (token string, sent bool, err error) {
	switch values := r.Header["Authorization"]; {
	case len(values) == 0:
		return "", false, nil
	case len(values) > 1:
		return "", false, ErrCredential
	default:
		scheme, token, found := strings.Cut(values[0], " ")
		if !found || !strings.EqualFold(scheme, "Bearer") {
			return "", false, nil // for somebody else
		}
		return strings.TrimLeft(token, " "), true, nil
	}
}

func (id *Identity) trusts(a netip.Addr) bool {
	for _, p := range id.Proxies {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// client is the address that the nearest proxy not trusted, or the client, was seen at: each trusted proxy appended the one it
// saw, and what stands before that may be made up.
func (id *Identity) client(peer netip.Addr, forwarded []string) netip.Addr {
	at := peer
	hops := 0
	for i := len(forwarded) - 1; i >= 0; i-- {
		rest := forwarded[i]
		for rest != "" {
			hop := rest
			if comma := strings.LastIndexByte(rest, ','); comma >= 0 {
				rest, hop = rest[:comma], rest[comma+1:]
			} else {
				rest = ""
			}
			a, err := netip.ParseAddr(strings.TrimSpace(hop))
			if err != nil {
				return at
			}
			at = a.Unmap().WithZone("")
			if hops++; !id.trusts(at) || hops == maxHops {
				return at
			}
		}
	}
	return at
}

// ValidID accepts what can safely stand in headers, logs and keys: 1 to inventory.MaxIDLength bytes of printable ASCII, no spaces.
func ValidID(s string) bool {
	if len(s) == 0 || len(s) > inventory.MaxIDLength {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// TokenOptions say which tokens name a buyer.
type TokenOptions struct {
	Issuer, Audience string
	JWKS             string // URL or file of the issuer's public keys
	Claim            string // that names the buyer
	Leeway           time.Duration
}

// Token verifies JSON Web Tokens (RFC 7519), as RFC 8725 advises: of one issuer for one audience, signed by a public key.
type Token struct {
	parser  *jwt.Parser
	key     func(*jwt.Token) (any, error)
	claim   string
	leeway  time.Duration
	seed    maphash.Seed
	believe [cachedTokens]atomic.Pointer[believed]
}

// believed is a token that was verified. To verify costs more than all the rest of a refusal.
type believed struct {
	token, buyer string
	until        time.Time
}

// NewToken makes a verifier. It fetches the issuer's keys now, and again in the background until the context ends: now and then,
// and when a token names one that is not known.
func NewToken(ctx context.Context, o TokenOptions, log *slog.Logger) (*Token, error) {
	t := &Token{claim: o.Claim, leeway: o.Leeway, seed: maphash.MakeSeed(), parser: jwt.NewParser(
		// Never "none", and none with a shared secret, for which a public key could be taken.
		jwt.WithValidMethods([]string{"EdDSA", "ES256", "ES384", "ES512", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"}),
		jwt.WithIssuer(o.Issuer), jwt.WithAudience(o.Audience), jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(o.Leeway))}
	if strings.HasPrefix(o.JWKS, "https://") || strings.HasPrefix(o.JWKS, "http://") {
		wait := true
		set, err := keyfunc.NewDefaultOverrideCtx(ctx, []string{o.JWKS}, keyfunc.Override{
			HTTPTimeout: 5 * time.Second, RefreshInterval: jwksEvery, NoErrorReturnFirstHTTPReq: &wait,
			// A flood of tokens with made-up keys must not become a flood of requests to the issuer, nor wait for it.
			RefreshUnknownKID: rate.NewLimiter(rate.Every(10*time.Second), 1), RateLimitWaitMax: time.Millisecond,
			RefreshErrorHandlerFunc: func(url string) func(context.Context, error) {
				return func(_ context.Context, err error) {
					log.Warn("could not fetch the issuer's keys, those known stay in use", "url", url, "error", err)
				}
			},
		})
		if err != nil {
			return nil, fmt.Errorf("reading the issuer's keys from %s: %w", o.JWKS, err)
		}
		t.key = set.Keyfunc
		return t, nil
	}
	var current atomic.Pointer[keyfunc.Keyfunc]
	last := ""
	load := func() error {
		text, err := os.ReadFile(o.JWKS)
		if err != nil || string(text) == last {
			return err
		}
		set, err := keyfunc.NewJWKSetJSON(json.RawMessage(text))
		if err == nil {
			last = string(text)
			current.Store(&set)
		}
		return err
	}
	if err := load(); err != nil {
		return nil, fmt.Errorf("reading the issuer's keys from %s: %w", o.JWKS, err)
	}
	t.key = func(token *jwt.Token) (any, error) { return (*current.Load()).Keyfunc(token) }
	go func() {
		ticker := time.NewTicker(fileEvery)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if err := load(); err != nil {
					log.Warn("could not read the issuer's keys, those known stay in use", "file", o.JWKS, "error", err)
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return t, nil
}

// Buyer names the buyer whose token it is, or fails with ErrCredential.
func (t *Token) Buyer(token string) (string, error) {
	if len(token) > maxToken {
		return "", ErrCredential
	}
	now := time.Now()
	slot := &t.believe[maphash.String(t.seed, token)%cachedTokens]
	if b := slot.Load(); b != nil && b.token == token && now.Before(b.until) {
		return b.buyer, nil
	}
	claims := jwt.MapClaims{}
	if _, err := t.parser.ParseWithClaims(token, claims, t.key); err != nil {
		return "", fmt.Errorf("%w: %w", ErrCredential, err)
	}
	buyer, ok := claims[t.claim].(string)
	if !ok || !ValidID(buyer) {
		return "", fmt.Errorf("%w: the claim %s names no buyer", ErrCredential, t.claim)
	}
	b := &believed{token: strings.Clone(token), buyer: buyer, until: now.Add(cachedFor)}
	if expires, err := claims.GetExpirationTime(); err == nil && expires != nil && expires.Add(t.leeway).Before(b.until) {
		b.until = expires.Add(t.leeway)
	}
	slot.Store(b)
	return buyer, nil
}
