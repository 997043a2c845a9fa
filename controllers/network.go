package controllers

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	networkingac "k8s.io/client-go/applyconfigurations/networking/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// How shoppers and the checkout reach the pods.

const servicePort = 80

func (s *scope) service() runtime.ApplyConfiguration {
	spec := s.sale.Spec.Reserver.Service
	return corev1ac.Service(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).
		WithAnnotations(spec.Annotations).
		WithSpec(corev1ac.ServiceSpec().
			WithType(spec.Type).
			WithSelector(s.selector("reserver")).
			WithPorts(corev1ac.ServicePort().WithName("http").WithPort(servicePort).WithTargetPort(intstr.FromString("http")).WithProtocol(corev1.ProtocolTCP)))
}

// networkPolicy lets everybody reach the API, and the cluster's pods the admin port. What the pods may reach is not
// bounded: only Secrets say where the database and the webhook are.
func (s *scope) networkPolicy() runtime.ApplyConfiguration {
	port := func(name string) *networkingac.NetworkPolicyPortApplyConfiguration {
		return networkingac.NetworkPolicyPort().WithProtocol(corev1.ProtocolTCP).WithPort(intstr.FromString(name))
	}
	ofSale := s.selector("")
	delete(ofSale, "app.kubernetes.io/component")
	return networkingac.NetworkPolicy(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).
		WithSpec(networkingac.NetworkPolicySpec().
			WithPodSelector(metav1ac.LabelSelector().WithMatchLabels(ofSale)).
			WithPolicyTypes(networkingv1.PolicyTypeIngress).
			WithIngress(
				networkingac.NetworkPolicyIngressRule().WithPorts(port("http")),
				networkingac.NetworkPolicyIngressRule().WithPorts(port("admin")).
					WithFrom(networkingac.NetworkPolicyPeer().WithNamespaceSelector(metav1ac.LabelSelector()))))
}

func (s *scope) ingress() runtime.ApplyConfiguration {
	want := s.sale.Spec.Reserver.Ingress
	spec := networkingac.IngressSpec().WithRules(networkingac.IngressRule().WithHost(want.Host).
		WithHTTP(networkingac.HTTPIngressRuleValue().WithPaths(networkingac.HTTPIngressPath().
			WithPath("/").WithPathType(networkingv1.PathTypePrefix).
			WithBackend(networkingac.IngressBackend().WithService(networkingac.IngressServiceBackend().
				WithName(reserverName(s.sale)).WithPort(networkingac.ServiceBackendPort().WithNumber(servicePort)))))))
	if want.ClassName != "" {
		spec.WithIngressClassName(want.ClassName)
	}
	if want.TLSSecretName != "" {
		spec.WithTLS(networkingac.IngressTLS().WithHosts(want.Host).WithSecretName(want.TLSSecretName))
	}
	return networkingac.Ingress(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).WithAnnotations(want.Annotations).WithSpec(spec)
}

// routeKind is HTTPRoute of the Gateway API. It is written without its Go module: one object is not worth the dependency.
var routeKind = schema.GroupVersionKind{Group: "gateway.networking.k8s.io", Version: "v1", Kind: "HTTPRoute"}

// HasGatewayAPI says whether the cluster knows HTTPRoutes. What is installed later is found at the next start.
func HasGatewayAPI(config *rest.Config) (bool, error) {
	known, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return false, fmt.Errorf("making a discovery client: %w", err)
	}
	list, err := known.ServerResourcesForGroupVersion(routeKind.GroupVersion().String())
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("asking the API server for the Gateway API: %w", err)
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Kind == routeKind.Kind }), nil
}

func emptyRoute() client.Object {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(routeKind)
	return u
}

func (s *scope) httpRoute() runtime.ApplyConfiguration {
	want := s.sale.Spec.Reserver.HTTPRoute
	var parents, hosts []any
	for _, p := range want.ParentRefs {
		parent := map[string]any{"name": p.Name}
		if p.Namespace != "" {
			parent["namespace"] = p.Namespace
		}
		if p.SectionName != "" {
			parent["sectionName"] = p.SectionName
		}
		parents = append(parents, parent)
	}
	for _, h := range want.Hostnames {
		hosts = append(hosts, h)
	}
	spec := map[string]any{
		"parentRefs": parents,
		"rules":      []any{map[string]any{"backendRefs": []any{map[string]any{"name": reserverName(s.sale), "port": int64(servicePort)}}}},
	}
	if len(hosts) > 0 {
		spec["hostnames"] = hosts
	}
	u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	u.SetGroupVersionKind(routeKind)
	u.SetName(reserverName(s.sale))
	u.SetNamespace(s.sale.Namespace)
	u.SetLabels(s.labels("reserver"))
	return client.ApplyConfigurationFromUnstructured(u)
}
